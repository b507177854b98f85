"""What every other room builds on: errors, events, documents, digests, random state, patience."""
