"""The recipes for real models: their estimates, their tiny twins, and the page about them."""
