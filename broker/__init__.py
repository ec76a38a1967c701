if __name__ != "headrace.broker":
    raise ImportError(f"{__name__} is imported as headrace.broker, or all of it would be there twice")
