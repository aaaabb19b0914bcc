"""From files of documents to the chunks, the design and the index that hold them."""
