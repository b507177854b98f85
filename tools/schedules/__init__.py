"""A simulated store under the real code: many orders of events, each of which a seed gives again."""
