"""`hwbackends demo`: a small hybrid model served through a backend, with every token compared with the stock model."""
