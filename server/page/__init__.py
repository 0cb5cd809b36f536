"""The page at GET /: its document, styles and scripts as a browser gets them. server/http/page.py serves them."""
