"""The contract of a reducer, and the parts that several reducers share."""
