if __name__ != "headrace.jetstream":
    raise ImportError(f"{__name__} is imported as headrace.jetstream, or all of it would be there twice")
