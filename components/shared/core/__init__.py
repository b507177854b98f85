"""What everything else stands on: errors, events, documents, randomness, digests."""
