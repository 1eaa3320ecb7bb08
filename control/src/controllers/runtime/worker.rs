//! Runs a controller: workers take keys from its queue, reconcile, wait for their own writes, and retry what failed.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::informer::Change;
use super::object::{Key, Object};
use super::queue::Queue;
use super::selector::Selector;
use super::session::{Context, Session};
use crate::client::Resource;
use crate::status::ApiError;

/// When to look at a key again although nothing has changed.
pub(crate) type Again = Option<Duration>;

/// One controller: brings the object behind a key closer to what it asks for.
pub(crate) trait Controller: Send + Sync + 'static {
    /// For logs.
    const NAME: &'static str;
    /// Keys worked on at the same time.
    const WORKERS: usize;

    fn reconcile(
        &self,
        key: &Key,
        session: &Session<'_>,
    ) -> impl Future<Output = Result<Again, ApiError>> + Send;
}

pub(crate) type KeyQueue = Arc<Queue<Key>>;

/// Adds the key of every changed object.
pub(crate) fn enqueue_changes(context: &Context, resource: Resource, queue: &KeyQueue) {
    let queue = queue.clone();
    context
        .informers
        .store(resource)
        .subscribe(move |change| queue.add(change.object().key()));
}

/// Adds the managing owner, when it is of this kind, of every changed object, before and after the change.
pub(crate) fn enqueue_owners(
    context: &Context,
    resource: Resource,
    owner_kind: &'static str,
    queue: &KeyQueue,
) {
    let queue = queue.clone();
    context
        .informers
        .store(resource)
        .subscribe(move |change: &Change| {
            for object in change.old.iter().chain(&change.new) {
                if let Some(owner) = object.controller().filter(|o| o.kind == owner_kind) {
                    queue.add(Key::new(object.namespace(), owner.name));
                }
            }
        });
}

/// Adds every owner in the namespace whose `spec.selector` matches an object that nobody manages: it may be one to
/// adopt, or the end of one that stood in the way.
pub(crate) fn enqueue_selecting(
    context: &Context,
    resource: Resource,
    owners: Resource,
    queue: &KeyQueue,
) {
    let queue = queue.clone();
    let owners = context.informers.store(owners);
    context
        .informers
        .store(resource)
        .subscribe(move |change: &Change| {
            let object = change.object();
            if object.controller().is_some() {
                return;
            }
            for owner in owners.in_namespace(object.namespace()) {
                let selector = Selector::from_label_selector(owner.at(&["spec", "selector"]));
                if selector.matches(object.labels()) {
                    queue.add(owner.key());
                }
            }
        });
}

/// An object that changed or went away since it was read is no failure: the news of it leads to another look.
pub(crate) fn tolerate_change<T>(result: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.is_not_found() || e.is_conflict() => Ok(None),
        Err(e) => Err(e),
    }
}

/// The namespace of the write is being deleted, or is gone.
fn namespace_ends(e: &ApiError) -> bool {
    e.details
        .causes
        .iter()
        .any(|c| c.reason == "NamespaceTerminating")
        || (e.is_not_found() && e.details.kind == "namespaces")
}

/// Works until shutdown.
pub(crate) async fn run<C: Controller>(
    controller: C,
    context: Context,
    queue: KeyQueue,
    shutdown: CancellationToken,
) {
    context.informers.synced().await;
    let controller = Arc::new(controller);
    let mut workers = JoinSet::new();
    for _ in 0..C::WORKERS {
        let (controller, context) = (controller.clone(), context.clone());
        let (queue, shutdown) = (queue.clone(), shutdown.clone());
        workers.spawn(async move {
            loop {
                let key = tokio::select! {
                    key = queue.next() => key,
                    () = shutdown.cancelled() => return,
                };
                tokio::select! {
                    () = work(controller.as_ref(), &context, &queue, &key) => {}
                    () = shutdown.cancelled() => return,
                }
            }
        });
    }
    while workers.join_next().await.is_some() {}
}

async fn work<C: Controller>(controller: &C, context: &Context, queue: &Queue<Key>, key: &Key) {
    let session = Session::new(context);
    let outcome = controller.reconcile(key, &session).await;
    session.settle().await;
    match outcome {
        Ok(again) => {
            queue.forget(key);
            if let Some(delay) = again {
                queue.add_after(key.clone(), delay);
            }
        }
        // Nothing can be made there any more, and its end takes the object of this key along.
        Err(e) if namespace_ends(&e) => queue.forget(key),
        Err(e) => {
            let delay = queue.retry(key.clone());
            // A conflict means that somebody else wrote first: reading again is all it takes.
            if e.is_conflict() {
                tracing::debug!(controller = C::NAME, %key, ?delay, error = %e, "trying again");
            } else {
                tracing::warn!(controller = C::NAME, %key, ?delay, error = %e, "reconcile failed");
            }
        }
    }
    queue.done(key);
}
