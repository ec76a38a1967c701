"""Settings of batches are checked where they are given."""

import pytest

from headrace.broker.batches.settings import BatchSettings


@pytest.mark.parametrize("url", ["hook", "ftp://a/b", "http://", "https:///x"])
def test_a_webhook_that_cannot_be_called_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match="webhook_url must be an http or https URL") as error:
        BatchSettings(webhook_url=url)
    assert repr(url) in str(error.value)


def test_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="window_lines"):
        BatchSettings(window_lines=0)
    assert BatchSettings(webhook_url="https://example.com/hook").window_lines == 1024
