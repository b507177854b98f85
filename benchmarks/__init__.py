"""`make bench`: Baton's checkpoint store and chunks, measured beside what one would write without them."""
