"""Learning-rate finder: the stage before the first chunk, where the recipe asks for one."""
