//! The Deployment core against a simulated world: ReplicaSets whose status lags behind, pods that become ready when
//! they like, users who change their minds.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::core::{Action, PodCounts, plan};
use super::sets::{self, Bounds, bounds, replicas, template_hash};
use crate::controllers::runtime::object::{Object, set};

fn start() -> Timestamp {
    "2024-01-01T00:00:00Z".parse().unwrap()
}

fn deployment(size: i64, surge: Value, unavailable: Value) -> Value {
    json!({
        "metadata": {"name": "d", "namespace": "ns", "uid": "d-uid", "generation": 1},
        "spec": {
            "replicas": size, "progressDeadlineSeconds": 600, "revisionHistoryLimit": 2,
            "selector": {"matchLabels": {"app": "d"}},
            "strategy": {"type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}},
            "template": {"metadata": {"labels": {"app": "d"}},
                "spec": {"containers": [{"name": "c", "image": "v0"}]}},
        },
    })
}

#[derive(Clone, Debug)]
struct Set {
    object: Value,
    /// Ready or not, one entry per pod.
    pods: Vec<bool>,
}

/// ReplicaSets and pods as they really are; `plan` only sees what the objects say.
#[derive(Clone, Debug)]
struct World {
    d: Value,
    sets: Vec<Set>,
    now: Timestamp,
    made: u32,
}

impl World {
    fn new(d: Value) -> Self {
        Self {
            d,
            sets: Vec::new(),
            now: start(),
            made: 0,
        }
    }

    fn round(&mut self) -> usize {
        self.now += SignedDuration::from_secs(1);
        let objects: Vec<Arc<Value>> = self
            .sets
            .iter()
            .map(|s| Arc::new(s.object.clone()))
            .collect();
        let new = sets::find_new(&self.d, &objects).map(|rs| rs.uid().to_owned());
        let old_pods = self
            .sets
            .iter()
            .any(|s| Some(s.object.uid()) != new.as_deref() && !s.pods.is_empty());
        let count = |set: &Set| {
            let available = set.pods.iter().filter(|r| **r).count();
            let counts = PodCounts {
                active: i64::try_from(set.pods.len()).unwrap(),
                available: i64::try_from(available).unwrap(),
            };
            (set.object.uid().to_owned(), counts)
        };
        let pods = self.sets.iter().map(count).collect();
        let plan = plan(&self.d, &objects, &pods, old_pods, self.now);
        let count = plan.actions.len();
        for action in plan.actions {
            match action {
                Action::Create(mut object) => {
                    self.made += 1;
                    set(
                        &mut object,
                        &["metadata", "uid"],
                        format!("rs-{}", self.made).into(),
                    );
                    let created =
                        (start() + SignedDuration::from_secs(self.made.into())).to_string();
                    set(
                        &mut object,
                        &["metadata", "creationTimestamp"],
                        created.into(),
                    );
                    assert!(self.sets.iter().all(|s| s.object.name() != object.name()));
                    self.sets.push(Set {
                        object,
                        pods: Vec::new(),
                    });
                }
                Action::Update { set: object, .. } => {
                    let slot = self
                        .sets
                        .iter_mut()
                        .find(|s| s.object.name() == object.name());
                    slot.unwrap().object = object;
                }
                Action::Delete(rs) => self.sets.retain(|s| s.object.uid() != rs.uid()),
            }
        }
        if let Some(revision) = plan.revision {
            let path = ["metadata", "annotations", sets::REVISION];
            set(&mut self.d, &path, revision.to_string().into());
        }
        set(&mut self.d, &["status"], plan.status);
        count
    }

    /// The ReplicaSet controller makes or removes pods of one set; those that are not ready go first.
    fn fill(&mut self, index: usize) {
        let Some(set) = self.sets.get_mut(index) else {
            return;
        };
        let wanted = usize::try_from(replicas(&set.object)).unwrap();
        set.pods.sort_unstable();
        while set.pods.len() > wanted {
            set.pods.remove(0);
        }
        set.pods.resize(wanted, false);
    }

    fn report(&mut self, index: usize) {
        let Some(it) = self.sets.get_mut(index) else {
            return;
        };
        let ready = it.pods.iter().filter(|r| **r).count();
        let status = json!({"replicas": it.pods.len(), "readyReplicas": ready,
            "availableReplicas": ready, "observedGeneration": it.object.generation()});
        set(&mut it.object, &["status"], status);
    }

    fn make_ready(&mut self, index: usize) {
        let Some(set) = self.sets.get_mut(index) else {
            return;
        };
        if let Some(pod) = set.pods.iter_mut().find(|r| !**r) {
            *pod = true;
        }
    }

    fn total(&self) -> i64 {
        self.sets.iter().map(|s| replicas(&s.object)).sum()
    }

    fn available(&self) -> i64 {
        let ready = self
            .sets
            .iter()
            .flat_map(|s| &s.pods)
            .filter(|r| **r)
            .count();
        i64::try_from(ready).unwrap()
    }

    fn pod_count(&self) -> i64 {
        i64::try_from(self.sets.iter().map(|s| s.pods.len()).sum::<usize>()).unwrap()
    }

    fn set_image(&mut self, image: u8) {
        let containers = json!([{"name": "c", "image": format!("v{image}")}]);
        set(
            &mut self.d,
            &["spec", "template", "spec", "containers"],
            containers,
        );
        let generation = self.d.generation() + 1;
        set(&mut self.d, &["metadata", "generation"], generation.into());
    }

    fn settle(&mut self) {
        for _ in 0..400 {
            let acted = self.round();
            for index in 0..self.sets.len() {
                self.fill(index);
                while self.sets[index].pods.iter().any(|r| !r) {
                    self.make_ready(index);
                }
                self.report(index);
            }
            if acted == 0 && self.round() == 0 {
                return;
            }
        }
        panic!("the rollout does not come to rest: {self:?}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Round,
    Fill(usize),
    Report(usize),
    Ready(usize),
    Image(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Round),
        3 => (0..4_usize).prop_map(Step::Fill),
        3 => (0..4_usize).prop_map(Step::Report),
        3 => (0..4_usize).prop_map(Step::Ready),
        1 => (0..3_u8).prop_map(Step::Image),
    ]
}

proptest! {
    #[test]
    fn a_rolling_update_keeps_its_bounds_and_arrives(
        size in 0..9_i64, surge in 0..4_i64, unavailable in 0..4_i64,
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut world = World::new(deployment(size, surge.into(), unavailable.into()));
        let Bounds { surge, unavailable } = bounds(&world.d);
        world.settle();
        for step in steps {
            match step {
                Step::Round => { world.round(); }
                Step::Fill(index) => world.fill(index),
                Step::Report(index) => world.report(index),
                Step::Ready(index) => world.make_ready(index),
                Step::Image(image) => world.set_image(image),
            }
            prop_assert!(world.total() <= size + surge, "too many pods asked for: {world:?}");
            prop_assert!(world.pod_count() <= size + surge, "too many pods at once: {world:?}");
            prop_assert!(
                world.available() >= size - unavailable,
                "{} of {size} are available: {world:?}", world.available()
            );
        }
        world.settle();
        let new = world.sets.iter().filter(|s| replicas(&s.object) > 0).count();
        prop_assert_eq!(new, usize::from(size > 0));
        prop_assert_eq!(world.total(), size);
        prop_assert!(world.sets.len() <= 3, "history of two and the new one");
        let progressing = world.d.condition("Progressing").unwrap();
        prop_assert_eq!(progressing.text(&["reason"]), "NewReplicaSetAvailable");
    }

    #[test]
    fn a_new_size_is_reached_from_the_middle_of_a_rollout(
        sizes in prop::collection::vec(0..12_i64, 1..6),
        steps in prop::collection::vec(step(), 0..40),
    ) {
        let mut world = World::new(deployment(5, json!("25%"), json!("25%")));
        world.settle();
        world.set_image(1);
        for size in sizes {
            for step in &steps {
                match step {
                    Step::Round => { world.round(); }
                    Step::Fill(index) => world.fill(*index),
                    Step::Report(index) => world.report(*index),
                    Step::Ready(index) => world.make_ready(*index),
                    Step::Image(image) => world.set_image(*image),
                }
            }
            set(&mut world.d, &["spec", "replicas"], size.into());
            let before = world.total();
            world.round();
            let Bounds { surge, .. } = bounds(&world.d);
            let most = if size > 0 { size + surge } else { 0 };
            prop_assert!(world.total() <= before.max(most), "{world:?}");
            world.settle();
            prop_assert_eq!(world.total(), size);
        }
    }
}

#[test]
fn percentages_round_as_documented() {
    let of = |size, surge: Value, unavailable: Value| bounds(&deployment(size, surge, unavailable));
    let want = |surge, unavailable| Bounds { surge, unavailable };
    assert_eq!(of(10, json!("25%"), json!("25%")), want(3, 2));
    assert_eq!(of(1, json!("25%"), json!("25%")), want(1, 0));
    assert_eq!(
        of(3, json!(0), json!(0)),
        want(0, 1),
        "something must be able to move"
    );
    assert_eq!(of(2, json!(1), json!(5)), want(1, 2));
    assert_eq!(of(4, json!("0%"), json!("10%")), want(0, 1));
}

#[test]
fn recreate_waits_for_the_last_old_pod() {
    let mut d = deployment(2, json!(1), json!(1));
    d["spec"]["strategy"] = json!({"type": "Recreate"});
    let mut world = World::new(d);
    world.settle();
    world.set_image(1);
    world.round();
    assert_eq!(world.total(), 0);
    for _ in 0..3 {
        assert_eq!(world.round(), 0, "old pods are still there");
    }
    assert_eq!(world.sets.len(), 1);
    world.fill(0);
    world.report(0);
    world.settle();
    assert_eq!(world.sets.len(), 2);
    assert_eq!(world.total(), 2);
}

#[test]
fn a_paused_deployment_scales_but_does_not_roll() {
    let mut world = World::new(deployment(1, json!(1), json!(0)));
    world.settle();
    set(&mut world.d, &["spec", "paused"], true.into());
    world.set_image(1);
    world.round();
    assert_eq!(world.sets.len(), 1);
    set(&mut world.d, &["spec", "replicas"], 2.into());
    world.round();
    assert_eq!((world.sets.len(), world.total()), (1, 2));
    let reason = |world: &World| {
        world
            .d
            .condition("Progressing")
            .map(|c| c.text(&["reason"]).to_owned())
            .unwrap()
    };
    assert_eq!(reason(&world), "DeploymentPaused");
    set(&mut world.d, &["spec", "paused"], false.into());
    world.settle();
    assert_eq!(reason(&world), "NewReplicaSetAvailable");
    let revision = world.d.annotation(sets::REVISION);
    assert_eq!((world.sets.len(), revision), (2, Some("2")));
}

#[test]
fn undo_brings_the_old_set_back_under_a_new_revision() {
    let mut world = World::new(deployment(1, json!(1), json!(0)));
    world.settle();
    world.set_image(1);
    world.settle();
    world.set_image(0);
    world.settle();
    let revisions: Vec<(i64, i64)> = world
        .sets
        .iter()
        .map(|s| (sets::revision(&s.object), replicas(&s.object)))
        .collect();
    assert_eq!(revisions, [(3, 1), (2, 0)]);
    let history = "deployment.kubernetes.io/revision-history";
    assert_eq!(world.sets[0].object.annotation(history), Some("1"));
    assert_eq!(world.d.annotation(sets::REVISION), Some("3"));
}

#[test]
fn a_rollout_without_progress_misses_its_deadline() {
    let mut d = deployment(1, json!(1), json!(0));
    set(&mut d, &["spec", "progressDeadlineSeconds"], 5.into());
    let mut world = World::new(d);
    world.round();
    world.fill(0);
    world.report(0);
    for _ in 0..4 {
        world.round();
    }
    let state = |world: &World| {
        let c = world.d.condition("Progressing").unwrap();
        (
            c.text(&["status"]).to_owned(),
            c.text(&["reason"]).to_owned(),
        )
    };
    assert_eq!(state(&world).0, "True");
    for _ in 0..4 {
        world.round();
    }
    assert_eq!(
        state(&world),
        ("False".to_owned(), "ProgressDeadlineExceeded".to_owned())
    );
    world.make_ready(0);
    world.report(0);
    world.settle();
    assert_eq!(state(&world).1, "NewReplicaSetAvailable");
}

#[test]
fn the_hash_depends_on_the_content_only() {
    let a = json!({"spec": {"x": 1, "y": [1, 2]}, "metadata": {}});
    let b = json!({"metadata": {}, "spec": {"y": [1, 2], "x": 1}});
    assert_eq!(template_hash(&a, 0), template_hash(&b, 0));
    assert_ne!(template_hash(&a, 0), template_hash(&a, 1));
    assert_ne!(
        template_hash(&a, 0),
        template_hash(&json!({"spec": {"x": 2}}), 0)
    );
    assert!(template_hash(&a, 0).len() <= 10);
}
