//! Bounds the memory of large answers that wait for their readers.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Response, header};
use hyper::body::Body as _;
use tokio::sync::Semaphore;

use super::respond::Answer;
use crate::status::ApiError;

/// Answers from this size on are charged.
const LARGE_BYTES: usize = 1 << 20;
/// Large answers at once, in units.
const UNITS: u32 = 256 << 10;
const UNIT_BYTES: usize = 1 << 10;
/// A charged answer is handed over in pieces, so that its end is known.
const PIECE_BYTES: usize = 64 << 10;
const RETRY_AFTER_S: u32 = 1;

/// What all large answers together may hold.
#[derive(Debug)]
pub(super) struct Budget {
    units: Arc<Semaphore>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            units: Arc::new(Semaphore::new(UNITS as usize)),
        }
    }
}

impl Budget {
    /// Lets an answer through; a large one gives its share back when it was read or given up.
    ///
    /// # Errors
    /// 429 while too much waits for slow readers.
    pub(super) async fn charge(&self, answer: Response<Body>) -> Answer {
        let Some(size) = answer.body().size_hint().exact() else {
            return Ok(answer);
        };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if size < LARGE_BYTES {
            return Ok(answer);
        }
        // An answer larger than everything takes everything.
        let share = u32::try_from(size / UNIT_BYTES).unwrap_or(UNITS).min(UNITS);
        let Ok(held) = Arc::clone(&self.units).try_acquire_many_owned(share) else {
            return Err(busy());
        };
        let (mut head, body) = answer.into_parts();
        let whole = axum::body::to_bytes(body, usize::MAX).await;
        let whole = whole.map_err(|e| {
            ApiError::new(
                500,
                "InternalError",
                format!("Internal error occurred: write the answer: {e}"),
            )
        })?;
        head.headers
            .insert(header::CONTENT_LENGTH, HeaderValue::from(whole.len()));
        let pieces = stream::unfold((whole, held), |(mut rest, held)| async move {
            if rest.is_empty() {
                return None;
            }
            let piece: Bytes = rest.split_to(PIECE_BYTES.min(rest.len()));
            Some((Ok::<_, Infallible>(piece), (rest, held)))
        });
        Ok(Response::from_parts(head, Body::from_stream(pieces)))
    }
}

fn busy() -> ApiError {
    let message = "too many large answers wait for their readers; try again";
    let mut error = ApiError::new(429, "TooManyRequests", message);
    error.details.retry_after_s = RETRY_AFTER_S;
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(bytes: usize) -> Response<Body> {
        Response::new(Body::from(vec![b'a'; bytes]))
    }

    #[tokio::test]
    async fn unread_answers_are_bounded_and_give_back_their_share() {
        let budget = Budget::default();
        let all = UNITS as usize * UNIT_BYTES;
        let half = budget.charge(answer(all / 2)).await.unwrap();
        assert_eq!(
            half.headers()[header::CONTENT_LENGTH],
            (all / 2).to_string()
        );
        let other = budget.charge(answer(all / 2)).await.unwrap();
        let refused = budget.charge(answer(LARGE_BYTES)).await.unwrap_err();
        assert_eq!((refused.code, refused.details.retry_after_s), (429, 1));
        budget.charge(answer(LARGE_BYTES - 1)).await.unwrap();
        drop(other);
        budget.charge(answer(LARGE_BYTES)).await.unwrap();

        let read = axum::body::to_bytes(half.into_body(), all).await.unwrap();
        assert_eq!(read.len(), all / 2);
        budget.charge(answer(2 * all)).await.unwrap();
    }
}
