"""A mean hour: what `baton drill` asks, asked of every stage of run after run, on a bad network and full disks."""
