"""Which tokens of a conversation the assistant wrote, from any chat template, by rendering."""
