"""SGLang as an engine, in a child process of the worker. Only the child imports SGLang; parsers are the exception."""
