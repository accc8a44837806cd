"""Amazon SQS, by boto3: the extra `sqs` installs it, and SQS(…) asks for it."""

from txbox.brokers.sqs.source import SQS

__all__ = ["SQS"]
