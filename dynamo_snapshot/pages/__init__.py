"""Self-contained HTML pages: one style, one script, SVG; nothing is loaded from elsewhere."""
