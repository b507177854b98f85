"""What every other room builds on: errors, events, digests, random state, patience."""
