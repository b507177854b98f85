"""Files of rows, of every supported type, as streams that are read once."""
