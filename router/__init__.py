if __name__ != "headrace.router":
    raise ImportError(f"{__name__} is imported as headrace.router, or all of it would be there twice")
