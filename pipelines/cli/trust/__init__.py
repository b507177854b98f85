"""Commands by which a stranger need not trust a run: keys, signatures, an audit."""
