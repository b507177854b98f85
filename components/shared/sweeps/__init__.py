"""Many configurations of one recipe, judged in rungs."""
