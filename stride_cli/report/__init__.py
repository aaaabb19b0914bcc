"""Answers as pages: what a report shows, as data and as one HTML file."""
