"""Amazon SQS through boto3, which the extra `sqs` installs; SQS(…) reports when it is missing."""

from txbox.brokers.sqs.source import SQS

__all__ = ["SQS"]
