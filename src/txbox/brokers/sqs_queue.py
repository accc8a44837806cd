"""One queue of SQS to receive from, and the receipts by which its messages are kept, deleted, given back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from txbox.brokers.sqs_call import DENIED, GONE
from txbox.errors import BrokerUnavailable, ConfigurationError

_log = logging.getLogger("txbox")

VISIBLE_MAX_S = 12 * 3600.0  # from the receipt on; no extension leads beyond it
_BATCH_MAX = 10  # SQS's own bound, on every call
_QUIET_S = (0.1, 1.0)
_RECEIPT_GONE = frozenset({
    "ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
})  # fmt: skip


@dataclass(slots=True, eq=False)
class Queue:
    """What a source knows of one queue. Every call raises as `_called` says.

    Args:
        per_group: it deduplicates within a message group.
        visible_s: how long a message is ours without word from us.
        quiet_s: how long an empty queue is left alone; `look_at`: until when, of the monotonic clock.
    """

    client: Any
    topic: str
    url: str
    arn: str
    per_group: bool
    visible_s: int
    quiet_s: float = 0.0
    look_at: float = 0.0

    def receive(self, messages_max: int, wait_s: int) -> Sequence[dict[str, Any]]:
        answer = _called(
            lambda: self.client.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=min(messages_max, _BATCH_MAX),
                WaitTimeSeconds=wait_s,
                VisibilityTimeout=self.visible_s,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            ),
            self.topic,
        )
        received: Sequence[dict[str, Any]] = answer.get("Messages", [])
        # while others are worked on, an empty queue is not asked many times a second
        first_s, longest_s = _QUIET_S
        self.quiet_s = 0.0 if received else min(max(first_s, 2 * self.quiet_s), longest_s)
        self.look_at = time.monotonic() + self.quiet_s
        return received

    def extend(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        entries: list[dict[str, Any]] = []
        for index, receipt in enumerate(receipts):
            left_s = VISIBLE_MAX_S - (time.monotonic() - receipt.received_at)
            receipt.gone = left_s < 1
            if receipt.gone:
                _log.warning(
                    "A message of %s is in flight for 12 h: SQS will deliver it again.", self.topic
                )
            else:
                entries.append(_entry(index, receipt, min(self.visible_s, int(left_s))))
        if entries:
            for failed in self._change_visibility(entries):
                receipts[int(failed["Id"])].gone = failed.get("Code") in _RECEIPT_GONE
        return []

    def delete(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Return those that were not deleted."""
        entries = [_entry(index, receipt) for index, receipt in enumerate(receipts)]
        answer = _called(
            lambda: self.client.delete_message_batch(QueueUrl=self.url, Entries=entries),
            self.topic,
        )
        return [receipts[int(failed["Id"])] for failed in answer.get("Failed", [])]

    def release(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        self._change_visibility(
            [_entry(index, receipt, 0) for index, receipt in enumerate(receipts)]
        )
        return []

    def _change_visibility(self, entries: list[dict[str, Any]]) -> list[Any]:
        answer = _called(
            lambda: self.client.change_message_visibility_batch(QueueUrl=self.url, Entries=entries),
            self.topic,
        )
        failed: list[Any] = answer.get("Failed", [])
        return failed


@dataclass(slots=True, eq=False)
class Receipt:
    """The right to delete one message: the newest handle of it.

    Args:
        received_at: of the monotonic clock, in seconds.
        gone: SQS does not know the handle any more, or will not in a moment.
    """

    queue: Queue
    message_id: str
    handle: str
    received_at: float = field(default_factory=time.monotonic)
    gone: bool = False


def look_up(
    client: Any, topic: str, queue: str, visible_s: int | None, *, deduplication_ids: bool
) -> Queue:
    """Ask for a queue by its name or URL.

    Args:
        visible_s: instead of the queue's own time-out.
        deduplication_ids: they are to be ids of messages.

    Raises:
        ConfigurationError: it is not there, or cannot be used so.
        BrokerUnavailable.
    """
    url: str = queue
    if "/" not in queue:
        url = _called(lambda: client.get_queue_url(QueueName=queue), queue, found=False)["QueueUrl"]
    known = _called(
        lambda: client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]),
        queue,
        found=False,
    )["Attributes"]
    if deduplication_ids and known.get("ContentBasedDeduplication") == "true":
        raise ConfigurationError(
            f"Queue {queue!r} hashes the content as deduplication id: two equal messages would be one; "
            "leave deduplication_ids out and send a message-id attribute."
        )
    visible_s = visible_s or int(known["VisibilityTimeout"])
    if visible_s < 1:
        raise ConfigurationError(
            f"Queue {queue!r} has no visibility time-out: pass visibility= to SQS(…)."
        )
    return Queue(
        client,
        topic,
        url,
        known["QueueArn"],
        per_group=known.get("DeduplicationScope") == "messageGroup",
        visible_s=visible_s,
    )


def in_batches(
    receipts: Sequence[Receipt], call: Callable[[Queue, Sequence[Receipt]], list[Receipt]]
) -> list[Receipt]:
    """Call with each queue's receipts, as many as SQS takes at once; returns what the calls do."""
    of_queue: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        of_queue.setdefault(receipt.queue.url, []).append(receipt)
    left: list[Receipt] = []
    for queue_receipts in of_queue.values():
        for start in range(0, len(queue_receipts), _BATCH_MAX):
            left += call(queue_receipts[0].queue, queue_receipts[start : start + _BATCH_MAX])
    return left


def _entry(index: int, receipt: Receipt, visible_s: int | None = None) -> dict[str, Any]:
    more = {} if visible_s is None else {"VisibilityTimeout": visible_s}
    return {"Id": str(index), "ReceiptHandle": receipt.handle, **more}


def _called(call: Callable[[], Any], queue: str, *, found: bool = True) -> Any:
    """Call SQS; what it answers decides whether waiting helps.

    Args:
        found: the queue has been there: who makes it anew, or starts its server, brings it back.

    Raises:
        ConfigurationError: no wait helps.
        BrokerUnavailable: it may.
    """
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        return call()
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound) as error:
        raise ConfigurationError(
            f"There are no credentials for queue {queue!r}: set AWS's variables, or pass a profile_name."
        ) from error
    except (
        boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError,
        boto.CredentialRetrievalError, ResponseParserError,
    ) as error:  # fmt: skip
        raise BrokerUnavailable(
            f"SQS cannot be reached for queue {queue!r} ({type(error).__name__})."
        ) from error
    except boto.ParamValidationError as error:
        raise ConfigurationError(f"Queue {queue!r} cannot be asked for: check its name.") from error
    except boto.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in DENIED or (code in GONE and not found):
            raise ConfigurationError(
                f"Queue {queue!r} cannot be used ({code}): check its name, the region and the permissions."
            ) from error
        raise BrokerUnavailable(f"SQS refused a call for queue {queue!r} ({code}).") from error
