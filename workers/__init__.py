if __name__ != "headrace.workers":
    raise ImportError(f"{__name__} is imported as headrace.workers, or all of it would be there twice")
