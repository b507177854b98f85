"""A first recipe for rows that have been looked at: what they are, what the field would begin with, and why."""
