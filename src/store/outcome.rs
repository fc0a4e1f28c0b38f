//! What became of a claimed attempt, as `lease_claim_closures.outcome` says it.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Completed,
    /// Failed, to be tried again; the attempt counts.
    Retryable,
    /// Given back; the attempt does not count.
    Released,
    /// Given back until later by its handler; the attempt does not count.
    Snoozed,
    /// Its body is in `done_entries`.
    Failed,
    /// Its body is in `done_entries`.
    Cancelled,
    /// Its body is in `dlq_entries`.
    DeadLettered,
    /// Completed, and since then its body is in `completed_entries`, unless its time was over.
    Kept,
    /// Its body is in `deferred_jobs` or in another segment; the attempt counts or not as
    /// the body says.
    Moved,
}

impl Outcome {
    pub fn code(self) -> u8 {
        match self {
            Self::Completed => b'c',
            Self::Retryable => b'r',
            Self::Released => b'l',
            Self::Snoozed => b's',
            Self::Failed => b'f',
            Self::Cancelled => b'x',
            Self::DeadLettered => b'd',
            Self::Kept => b'k',
            Self::Moved => b'm',
        }
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            b'c' => Self::Completed,
            b'r' => Self::Retryable,
            b'l' => Self::Released,
            b's' => Self::Snoozed,
            b'f' => Self::Failed,
            b'x' => Self::Cancelled,
            b'd' => Self::DeadLettered,
            b'k' => Self::Kept,
            b'm' => Self::Moved,
            _ => return None,
        })
    }

    /// The segment is done with the job by this.
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Retryable | Self::Released | Self::Snoozed | Self::Kept)
    }

    pub fn counts_attempt(self) -> bool {
        !matches!(self, Self::Released | Self::Snoozed)
    }
}
