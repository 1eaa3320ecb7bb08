//! Tells the owner of a Service what of it is not served: an Event for each refusal, once for as long as it lasts.

use std::time::{SystemTime, UNIX_EPOCH};

use control_api::desired::DesiredState;
use control_api::v1::EventReport;
use weir_agent::compile::services::{Owner, Refusal};
use weir_agent::feed::FeedHandle;
use weir_agent::policy::ShutPod;

/// Reasons of the Events.
const REASON: &str = "NotServed";
const REASON_SHUT: &str = "NetworkShut";

/// Sends the Events, when there is anybody to tell. Best effort: a refusal is also in the log and in `weirctl services`.
pub(super) fn tell(feed: &FeedHandle, state: &DesiredState, refusals: &[Refusal]) {
    let events = events(state, refusals, now_us());
    if events.is_empty() {
        return;
    }
    let feed = feed.clone();
    tokio::spawn(async move {
        if let Err(e) = feed.report_events(events).await {
            tracing::debug!(error = %e, "Events of Services that are not served could not be recorded");
        }
    });
}

/// Sends an Event to each pod that nothing may pass to or from.
pub(super) fn tell_shut(feed: &FeedHandle, state: &DesiredState, pods: &[ShutPod]) {
    if pods.is_empty() {
        return;
    }
    let at_us = now_us();
    let event = |pod: &ShutPod| EventReport {
        kind: "Pod".into(),
        namespace: pod.name.namespace.clone(),
        name: pod.name.name.clone(),
        uid: match state.policy_peers.get(&pod.name) {
            Some(peer) if pod.uid.is_empty() => peer.uid.clone(),
            _ => pod.uid.clone(),
        },
        r#type: "Warning".into(),
        reason: REASON_SHUT.into(),
        message: format!("nothing may pass to or from the pod: {}", pod.why),
        at_us,
    };
    let events = pods.iter().map(event).collect();
    let feed = feed.clone();
    tokio::spawn(async move {
        if let Err(e) = feed.report_events(events).await {
            tracing::debug!(error = %e, "Events of pods that are shut could not be recorded");
        }
    });
}

fn events(state: &DesiredState, refusals: &[Refusal], at_us: i64) -> Vec<EventReport> {
    let event = |refusal: &Refusal| {
        // The runtime has asked for a host port; the agent's log says what became of it.
        let Owner::Service(name) = &refusal.owner else {
            return None;
        };
        Some(EventReport {
            kind: "Service".into(),
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            uid: state.services.get(name)?.uid.clone(),
            r#type: "Warning".into(),
            reason: REASON.into(),
            message: format!("{} is not served: {}", refusal.what, refusal.why),
            at_us,
        })
    };
    refusals.iter().filter_map(event).collect()
}

fn now_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use control_api::desired::Name;
    use control_api::v1::Service;

    use super::*;

    #[test]
    fn services_that_exist_get_an_event() {
        let name = Name::new("shop", "web");
        let mut state = DesiredState::default();
        let service = Service {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "u1".into(),
            ..Service::default()
        };
        state.services.insert(name.clone(), service);
        let refusal = |owner| Refusal {
            owner,
            what: "external IP 10.96.0.1".into(),
            why: "it is in the range of cluster addresses".into(),
        };
        let refusals = [
            refusal(Owner::Service(name)),
            refusal(Owner::Service(Name::new("shop", "gone"))),
            refusal(Owner::HostPort("pod shop/a".into())),
        ];
        let events = events(&state, &refusals, 7);
        assert_eq!(events.len(), 1);
        assert_eq!((events[0].uid.as_str(), events[0].at_us), ("u1", 7));
        assert!(events[0].message.contains("10.96.0.1 is not served"));
    }
}
