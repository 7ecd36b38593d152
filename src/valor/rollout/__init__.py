"""Generation engines behind one request-level interface."""
