"""The models that can be served: torch only; knows no engine and no scheduler."""
