"""Reports of a chunk while it trains: metrics, progress, samples, scores, and where its time went."""
