"""What a chunk tells while it trains: metrics, progress, samples, scores, and where its time went."""
