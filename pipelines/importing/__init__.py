"""Recipes from other trainers' files: `baton import`.

`draft` holds a recipe in the making and what became of every key, `rules` are the tables' entries, `reading` and
`writing` the files; each trainer has a module for its settings and one for its data.
"""
