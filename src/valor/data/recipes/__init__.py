"""The data sets that `valor data prepare` knows, one declarative recipe each."""
