"""Settings of batches. Durations are in seconds, sizes in bytes."""

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from headrace.base.setting import Setting, check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of batches in one frontend. Raises ValueError naming the setting and its value."""

    window_lines: Annotated[
        int, Setting("Most lines of a model, over all batches, that are stored as jobs without a result.", least=1)
    ] = 1024
    max_lines: Annotated[int, Setting("Most lines of a batch.", least=1)] = 50_000
    max_file_bytes: Annotated[int, Setting("Largest input file.", least=1, most=4_000_000_000, metavar="BYTES")] = (
        200 * 1024 * 1024
    )
    max_inputs: Annotated[int, Setting("Most inputs of all lines of an embeddings batch.", least=1)] = 50_000
    copied_bytes: Annotated[
        int,
        Setting(
            "Most bytes of batches (copies of input files, lines of result files) in a frontend's temporary "
            "folder; more are reread from the broker. 0: none.",
            least=0,
            metavar="BYTES",
        ),
    ] = 2 * 1024 * 1024 * 1024
    tenant_batches: Annotated[int, Setting("Most open batches of a tenant.", least=1)] = 100
    tenant_batches_per_hour: Annotated[int, Setting("Most batches that a tenant may create in an hour.", least=1)] = 2000
    tenant_lines: Annotated[int, Setting("Most lines without a result in all batches of a tenant.", least=1)] = 500_000
    tenant_prompt_tokens: Annotated[
        int, Setting("Most estimated prompt tokens of those lines, at four bytes a token; 0: no limit.", least=0)
    ] = 0
    keep_s: Annotated[float, Setting("Life of a batch's record after its end.", least=3600)] = 30 * 86_400.0
    output_ttl_s: Annotated[float, Setting("Default life of its files.", least=3600)] = 30 * 86_400.0
    webhook_url: Annotated[str | None, Setting("URL that receives the ends of batches.", metavar="URL")] = None
    webhook_secret: Annotated[str | None, Setting("Secret to sign webhooks, as in Standard Webhooks.", secret=True)] = None
    webhook_tries: Annotated[int, Setting("Attempts to post one, with waits that grow to an hour.", least=1)] = 12

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.webhook_url is None:
            return
        parts = urlsplit(self.webhook_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"webhook_url must be an http or https URL, got {self.webhook_url[:100]!r}")
