"""What models write, compared with the rows' own answers: metrics, the user's own functions, figures over rows."""
