if __name__ != "headrace.frontend":
    raise ImportError(f"{__name__} is imported as headrace.frontend, or all of it would be there twice")
