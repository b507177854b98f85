"""How many of the examples of axolotl and LLaMA-Factory import, what is left over, and how many take two steps.

    python -m tests.importers.measuring --axolotl FOLDER --llamafactory FOLDER [--steps] [--sample N]

Folders are checkouts of the two projects; nothing is fetched.
"""
