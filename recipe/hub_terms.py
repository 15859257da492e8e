"""The identifiers that the Hub accepts in the metadata of a model card.

Sources: huggingface/hub-docs, docs/hub/repositories-licenses.md and modelcard.md, August 2026.
"""

import re
from collections.abc import Iterable

from recipe.errors import UserError, did_you_mean

LICENSES = (
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m "
    "afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 "
    "cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 "
    "cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 "
    "cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl "
    "gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr "
    "mpl-2.0 odc-by odbl openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl "
    "lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 "
    "grok2-community gemma unknown"
)


def check_license(license_id: str | None) -> None:
    """Raise `UserError` for a license that the Hub would refuse."""
    if license_id == "other":  # the Hub then requires a name and a text, which a run does not have
        raise UserError("hub_license other needs a name and a text; omit it and edit the card on the Hub instead")
    known = LICENSES.split()
    if license_id is not None and license_id not in known:
        listed = "the identifiers are listed at https://huggingface.co/docs/hub/repositories-licenses"
        hint = did_you_mean(license_id.lower(), known, otherwise=listed)
        raise UserError(f"the Hub knows no license '{license_id}'; {hint}")


def check_languages(codes: Iterable[str]) -> None:
    """Raise `UserError` for what cannot be a language of the Hub."""
    for code in codes:
        if not re.fullmatch(r"[a-z]{2,3}|multilingual|code", code):
            expected = "an ISO 639 code of two or three lower-case letters, as in --hub_language en de"
            raise UserError(f"hub_language must be {expected}, multilingual or code, got '{code}'")
