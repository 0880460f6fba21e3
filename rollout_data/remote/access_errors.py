"""Recognition of file system errors that mean denied access: 401, 403, no valid credentials.

The fsspec file systems of stores raise errors of their own classes. Some convert these to general
errors such as `OSError`. To avoid imports of their packages, errors are recognized by HTTP status,
error code or class name. General errors are also recognized by their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from storage.errors import UnansweredError

_STATUSES = (401, 403)
#: Attributes that contain the HTTP status in errors of aiohttp, requests, Azure, Google and urllib.
_STATUS_NAMES = ("status", "status_code", "code")
#: Error codes of S3 and compatible stores that mean denied access, in addition to "401" and "403".
_CODES = {
    "accessdenied", "accessdeniedexception", "accountproblem", "allaccessdisabled", "authenticationfailed",
    "authfailure", "authorizationfailure", "authorizationpermissionmismatch", "expiredtoken", "expiredtokenexception",
    "forbidden", "insufficientaccountpermissions", "invalidaccesskeyid", "invalidauthenticationinfo",
    "invalidclienttokenid", "invalidsecurity", "invalidtoken", "invalidtokenid", "missingauthenticationtoken",
    "notsignedup", "requestexpired", "requesttimetooskewed", "signaturedoesnotmatch", "tokenrefreshrequired",
    "unauthorized", "unauthorizedaccess", "unrecognizedclientexception",
}  # fmt: skip
#: Names of error classes for missing or expired credentials and denied access.
_CLASSES = re.compile(
    r"Credential|Unauthorized|Unauthenticated|Forbidden|AccessDenied|PermissionDenied|AuthenticationError"
    r"|RefreshError|LoginRefreshRequired|TokenRetrievalError|TokenLoadError|NoAuthToken|GatedRepo"
)
#: Texts of general errors that mean denied access. A bare number does not match, since it may be
#: part of a file name.
_TEXTS = re.compile(
    r"\b40[13]\b[\s,:(-]*(client error)?[\s,:]*(unauthorized|forbidden)|^\s*(unauthorized|forbidden)\b"
    r"|\b(status|code|http|error)\b[^a-z0-9]{0,4}40[13]\b|\b(access|permission) denied\b|\bexpiredtoken\b"
    r"|\b(token|credentials?|signature)\b[^.]{0,40}\bexpired\b|\bexpired (token|credentials?)\b"
    r"|\b(invalid|missing|no|unable to locate)( authentication)? credentials\b"
    r"|\bdoes not have [a-z.]*\.objects\.\w+ access\b",
    re.IGNORECASE,
)
#: Pattern of the error code in an error text of boto.
_CODE_IN_TEXT = re.compile(r"\((\w+)\) when calling\b|^(\w+): ")
_MAX_CAUSES = 16


class AccessError(UnansweredError):
    """A store denied access: 401, 403, or missing or expired credentials."""


def denial(error: BaseException) -> BaseException | None:
    """Return the first error that means denied access, among an error and its causes, or None."""
    return next((cause for cause in _causes(error) if _is_denial(cause)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors that caused it."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_denial(error: BaseException) -> bool:
    if isinstance(error, PermissionError) or _CLASSES.search(type(error).__name__):
        return True
    response = getattr(error, "response", None)
    if _has_status(error) or _has_status(response):
        return True
    if isinstance(response, Mapping) and _is_denied_response(response):
        return True
    code = getattr(error, "error_code", None)
    if isinstance(code, str) and code.lower() in _CODES:
        return True
    is_general = isinstance(error, (OSError, RuntimeError, ValueError)) or type(error) is Exception
    if not is_general or isinstance(error, FileNotFoundError):
        return False
    return bool(_TEXTS.search(str(error))) or _has_code_in_text(str(error))


def _has_code_in_text(text: str) -> bool:
    codes = {code.lower() for groups in _CODE_IN_TEXT.findall(text) for code in groups}
    return not codes.isdisjoint({*_CODES, *map(str, _STATUSES)})


def _has_status(holder: Any) -> bool:
    for name in _STATUS_NAMES:
        status = getattr(holder, name, None)
        if status in _STATUSES or (isinstance(status, str) and status in map(str, _STATUSES)):
            return True
    return False


def _is_denied_response(response: Mapping[str, Any]) -> bool:
    """Return whether a boto response has an error code or HTTP status that means denied access."""
    error: Any = response.get("Error")
    code = error.get("Code") if isinstance(error, Mapping) else None
    metadata: Any = response.get("ResponseMetadata")
    status = metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None
    return status in _STATUSES or str(code) in map(str, _STATUSES) or str(code).lower() in _CODES
