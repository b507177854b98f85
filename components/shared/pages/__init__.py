"""What HTML pages share: templates, figures, the page of the data's quality."""
