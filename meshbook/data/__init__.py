"""Tables, arrays and DataFrames of other libraries: batches that come in, columns that go out."""
