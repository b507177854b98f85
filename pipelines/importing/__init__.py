"""Recipes from other trainers' files: `baton import`.

`draft` holds a recipe in the making and what became of every key, `table` is the format of the tables, `reading` and
`writing` deal with the files; each trainer has a module for its settings and one for its data.
"""
