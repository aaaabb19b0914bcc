"""`stride serve`: open indexes behind a local address, for a page, for programs and for `stride query`."""
