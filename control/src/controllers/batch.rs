//! Many writes of one kind at once, carefully: a refusal (a quota, a policy) must not be met a hundred times.

use std::future::Future;

use crate::status::ApiError;

/// Size of the first batch; each batch that succeeds doubles the next.
const FIRST_BATCH: usize = 4;

/// Runs `work` `count` times in growing concurrent batches and stops after the first batch with a failure.
pub(crate) async fn slow_start<F>(count: usize, work: impl Fn() -> F) -> Result<(), ApiError>
where
    F: Future<Output = Result<(), ApiError>>,
{
    let (mut left, mut batch) = (count, FIRST_BATCH);
    while left > 0 {
        let size = batch.min(left);
        let results = futures::future::join_all((0..size).map(|_| work())).await;
        results.into_iter().collect::<Result<(), ApiError>>()?;
        left -= size;
        batch *= 2;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn a_refusal_stops_after_its_batch() {
        let calls = Cell::new(0);
        let refuse = || async {
            calls.set(calls.get() + 1);
            Err(ApiError::new(403, "Forbidden", "quota"))
        };
        assert!(slow_start(100, refuse).await.is_err());
        assert_eq!(calls.get(), FIRST_BATCH);
    }

    #[tokio::test]
    async fn everything_is_done_when_nothing_fails() {
        let calls = Cell::new(0);
        let accept = || async {
            calls.set(calls.get() + 1);
            Ok(())
        };
        assert!(slow_start(100, accept).await.is_ok());
        assert_eq!(calls.get(), 100);
    }
}
