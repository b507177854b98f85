"""What is wrong with a recipe, in words that hold the text to write instead wherever that is known."""
