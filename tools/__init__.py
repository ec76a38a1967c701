if __name__ != "headrace.tools":
    raise ImportError(f"{__name__} is imported as headrace.tools, or all of it would be there twice")
