"""`validate ops`: the operators of the cost model against tables of measured operators."""
