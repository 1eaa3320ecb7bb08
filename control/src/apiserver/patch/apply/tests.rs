use serde_json::json;

use super::*;

const CONFIG_MAP: Gvk<'static> = Gvk::new("", "v1", "ConfigMap");
const DEPLOYMENT: Gvk<'static> = Gvk::new("apps", "v1", "Deployment");

fn apply(
    gvk: Gvk<'_>,
    live: Option<&Value>,
    manager: &str,
    force: bool,
    config: Value,
) -> Result<Value, ApiError> {
    let mut config = config;
    config["apiVersion"] = gvk.api_version().into();
    config["kind"] = gvk.kind.into();
    config["metadata"]["name"] = "a".into();
    server_side_apply(&Apply {
        gvk,
        live,
        config: &config,
        manager,
        force,
        subresource: "",
        now: "2024-01-01T00:00:00Z",
    })
}

fn owner<'a>(object: &'a Value, manager: &str) -> &'a Value {
    let entries = object["metadata"]["managedFields"].as_array();
    let found = entries
        .into_iter()
        .flatten()
        .find(|e| e["manager"] == manager);
    &found.unwrap_or(&Value::Null)["fieldsV1"]
}

#[test]
fn conflicts_are_named_and_force_takes_over() {
    let one = apply(
        CONFIG_MAP,
        None,
        "one",
        false,
        json!({"data": {"k": "1", "l": "1", "m": "1"}}),
    )
    .unwrap();
    assert_eq!(
        owner(&one, "one"),
        &json!({"f:data": {"f:k": {}, "f:l": {}, "f:m": {}}})
    );
    let two = json!({"data": {"k": "2", "l": "2", "n": "2"}});
    let error = apply(CONFIG_MAP, Some(&one), "two", false, two.clone()).unwrap_err();
    assert_eq!((error.code, error.reason), (409, "Conflict"));
    let fields: Vec<&str> = error
        .details
        .causes
        .iter()
        .map(|c| c.field.as_str())
        .collect();
    assert_eq!(fields, [".data.k", ".data.l"]);
    assert_eq!(error.details.causes[0].message, "conflict with \"one\"");
    assert_eq!(
        error.message,
        "Apply failed with 2 conflicts: conflicts with \"one\":\n- .data.k\n- .data.l"
    );
    let forced = apply(CONFIG_MAP, Some(&one), "two", true, two).unwrap();
    assert_eq!(
        forced["data"],
        json!({"k": "2", "l": "2", "m": "1", "n": "2"})
    );
    assert_eq!(owner(&forced, "one"), &json!({"f:data": {"f:m": {}}}));
    let error = apply(
        CONFIG_MAP,
        Some(&forced),
        "one",
        false,
        json!({"data": {"k": "1", "m": "1"}}),
    )
    .unwrap_err();
    assert_eq!(
        error.message,
        "Apply failed with 1 conflict: conflict with \"two\": .data.k"
    );
}

#[test]
fn the_same_apply_again_changes_nothing() {
    let config = json!({"data": {"k": "v"}, "metadata": {"labels": {"x": "1"}}});
    let mut one = apply(CONFIG_MAP, None, "one", false, config.clone()).unwrap();
    one["metadata"]["resourceVersion"] = "5".into();
    one["metadata"]["managedFields"][0]["time"] = "2020-01-01T00:00:00Z".into();
    assert_eq!(
        apply(CONFIG_MAP, Some(&one), "one", false, config.clone()).unwrap(),
        one
    );
    assert_eq!(
        apply(CONFIG_MAP, Some(&one), "one", true, config).unwrap(),
        one
    );
}

fn spec(containers: Value) -> Value {
    json!({"spec": {"template": {"spec": {"containers": containers}}}})
}

#[test]
fn lists_by_key_have_an_owner_per_item_and_field() {
    let first = spec(
        json!([{"name": "c", "image": "app:1", "ports": [{"containerPort": 53, "name": "tcp"}]}]),
    );
    let one = apply(DEPLOYMENT, None, "one", false, first).unwrap();
    let containers = &owner(&one, "one")["f:spec"]["f:template"]["f:spec"]["f:containers"];
    assert_eq!(
        containers,
        &json!({"k:{\"name\":\"c\"}": {".": {}, "f:image": {}, "f:name": {}, "f:ports": {
            "k:{\"containerPort\":53,\"protocol\":\"TCP\"}": {".": {}, "f:containerPort": {}, "f:name": {}}}}})
    );
    let second = spec(json!([
        {"name": "c", "env": [{"name": "A", "value": "1"}], "ports": [{"containerPort": 53, "protocol": "UDP", "name": "udp"}]},
        {"name": "side", "image": "side:1"}]));
    let two = apply(DEPLOYMENT, Some(&one), "two", false, second).unwrap();
    let list = &two["spec"]["template"]["spec"]["containers"];
    assert_eq!(list[0]["image"], "app:1");
    assert_eq!(list[0]["ports"].as_array().unwrap().len(), 2);
    assert_eq!(list[1]["name"], "side");
    let again = spec(json!([{"name": "c", "image": "app:2"}]));
    let one = apply(DEPLOYMENT, Some(&two), "one", false, again).unwrap();
    let list = &one["spec"]["template"]["spec"]["containers"];
    assert_eq!(
        list[0]["ports"],
        json!([{"containerPort": 53, "protocol": "UDP", "name": "udp"}])
    );
    assert_eq!(list[0]["env"], json!([{"name": "A", "value": "1"}]));
    let done = apply(DEPLOYMENT, Some(&one), "two", false, json!({})).unwrap();
    assert_eq!(
        done["spec"]["template"]["spec"]["containers"],
        json!([{"name": "c", "image": "app:2"}])
    );
}

#[test]
fn sets_have_an_owner_per_value_and_atomic_lists_one_owner() {
    let finalizers = |value: &str| json!({"metadata": {"finalizers": [value]}});
    let one = apply(CONFIG_MAP, None, "one", false, finalizers("example.com/a")).unwrap();
    assert_eq!(
        owner(&one, "one")["f:metadata"]["f:finalizers"],
        json!({"v:\"example.com/a\"": {}})
    );
    let two = apply(
        CONFIG_MAP,
        Some(&one),
        "two",
        false,
        finalizers("example.com/b"),
    )
    .unwrap();
    assert_eq!(
        two["metadata"]["finalizers"],
        json!(["example.com/a", "example.com/b"])
    );
    let one = apply(CONFIG_MAP, Some(&two), "one", false, json!({})).unwrap();
    assert_eq!(one["metadata"]["finalizers"], json!(["example.com/b"]));
    let none = apply(CONFIG_MAP, Some(&one), "two", false, json!({})).unwrap();
    assert!(none["metadata"].get("finalizers").is_none());
    let live = apply(
        DEPLOYMENT,
        None,
        "one",
        false,
        spec(json!([{"name": "c", "args": ["a"]}])),
    )
    .unwrap();
    let error = apply(
        DEPLOYMENT,
        Some(&live),
        "two",
        false,
        spec(json!([{"name": "c", "args": ["a", "x"]}])),
    )
    .unwrap_err();
    assert_eq!(
        error.details.causes[0].field,
        ".spec.template.spec.containers[name=\"c\"].args"
    );
}

#[test]
fn merged_lists_keep_the_live_order_where_the_configuration_allows() {
    let names = |list: &[&str]| Value::Array(list.iter().map(|n| json!({"name": n})).collect());
    for (live, config, expected) in [
        (&["a", "b"][..], &["c"][..], &["a", "b", "c"][..]),
        (&["a", "b", "c"], &["c", "a"], &["b", "c", "a"]),
        (&["a", "x", "b"], &["a", "b"], &["a", "x", "b"]),
        (&["x", "a"], &["new", "a"], &["x", "new", "a"]),
        (&["a", "b"], &["b", "a", "c"], &["b", "a", "c"]),
    ] {
        let merged = typed::merge(
            shape_of(DEPLOYMENT),
            Some(&spec(names(live))),
            &spec(names(config)),
        );
        assert_eq!(merged, spec(names(expected)), "{live:?} {config:?}");
    }
}

#[test]
fn zero_values_are_applied() {
    let mut live = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": {"paused": true}});
    track_update(DEPLOYMENT, None, &mut live, "m", "", "2024-01-01T00:00:00Z");
    let error = apply(
        DEPLOYMENT,
        Some(&live),
        "one",
        false,
        json!({"spec": {"paused": false}}),
    )
    .unwrap_err();
    assert_eq!(error.details.causes[0].field, ".spec.paused");
    assert_eq!(
        error.details.causes[0].message,
        "conflict with \"m\" using apps/v1 at 2024-01-01T00:00:00Z"
    );
    let forced = apply(
        DEPLOYMENT,
        Some(&live),
        "one",
        true,
        json!({"spec": {"paused": false}}),
    )
    .unwrap();
    assert_eq!(forced["spec"]["paused"], false);
}

#[test]
fn configurations_that_cannot_be_applied_are_400() {
    for config in [
        json!({"dta": {}}),
        json!({"data": {"k": 1}}),
        json!({"metadata": {"managedFields": [{"manager": "x"}]}}),
    ] {
        assert_eq!(
            apply(CONFIG_MAP, None, "m", false, config.clone())
                .unwrap_err()
                .code,
            400,
            "{config}"
        );
    }
    let twice = spec(json!([{"name": "c", "env": [{"name": "A"}, {"name": "A"}]}]));
    assert_eq!(
        apply(DEPLOYMENT, None, "m", false, twice).unwrap_err().code,
        400
    );
    let untyped = json!({"metadata": {"name": "a"}});
    let request = Apply {
        gvk: CONFIG_MAP,
        live: None,
        config: &untyped,
        manager: "m",
        force: false,
        subresource: "",
        now: "",
    };
    assert_eq!(server_side_apply(&request).unwrap_err().code, 400);
}

fn written(old: Option<&Value>, manager: &str, mut new: Value, now: &str) -> Value {
    track_update(CONFIG_MAP, old, &mut new, manager, "", now);
    new
}

#[test]
fn ordinary_writes_own_what_they_change() {
    let base = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "u"}, "data": {"k": "v"}});
    let created = written(None, "acme", base, "2024-01-01T00:00:00Z");
    assert_eq!(
        created["metadata"]["managedFields"],
        json!([{"manager": "acme", "operation": "Update", "apiVersion": "v1", "time": "2024-01-01T00:00:00Z",
                "fieldsType": "FieldsV1", "fieldsV1": {"f:data": {".": {}, "f:k": {}}}}])
    );
    let mut more = created.clone();
    more["data"]["l"] = "w".into();
    let more = written(Some(&created), "named", more, "2024-01-02T00:00:00Z");
    assert_eq!(owner(&more, "named"), &json!({"f:data": {"f:l": {}}}));
    let mut less = more.clone();
    less["data"].as_object_mut().unwrap().shift_remove("l");
    let less = written(Some(&more), "named", less, "2024-01-03T00:00:00Z");
    assert_eq!(
        less["metadata"]["managedFields"].as_array().unwrap().len(),
        1
    );
    assert_eq!(
        written(Some(&less), "other", less.clone(), "2024-01-04T00:00:00Z"),
        less,
        "no change, no new time"
    );
    let mut reset = less.clone();
    reset["metadata"]["managedFields"] = json!([{}]);
    assert!(
        written(Some(&less), "m", reset, "2024-01-05T00:00:00Z")["metadata"]
            .get("managedFields")
            .is_none()
    );
}

#[test]
fn many_writers_are_capped() {
    let mut object = written(
        None,
        "m0",
        json!({"metadata": {"name": "a"}, "data": {"k0": "v"}}),
        "2024-01-01T00:00:00Z",
    );
    for n in 1..30 {
        let mut next = object.clone();
        next["data"][format!("k{n}")] = "v".into();
        object = written(
            Some(&object),
            &format!("m{n}"),
            next,
            &format!("2024-01-01T00:00:{n:02}Z"),
        );
    }
    let entries = object["metadata"]["managedFields"].as_array().unwrap();
    assert_eq!(entries.len(), 10);
    assert!(entries.iter().any(|e| e["manager"] == "ancient-changes"));
}

#[test]
fn duplicated_items_keep_their_owners() {
    let env = json!([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]);
    let mut live = spec(json!([{"name": "c", "image": "i", "env": env}]));
    live["metadata"] = json!({"name": "a"});
    track_update(
        DEPLOYMENT,
        None,
        &mut live,
        "creator",
        "",
        "2024-01-01T00:00:00Z",
    );
    let after = apply(
        DEPLOYMENT,
        Some(&live),
        "labeller",
        false,
        json!({"metadata": {"labels": {"x": "1"}}}),
    )
    .unwrap();
    assert_eq!(
        after["spec"]["template"]["spec"]["containers"][0]["env"],
        env
    );
    assert_eq!(owner(&after, "creator"), owner(&live, "creator"));
}

#[test]
fn the_first_apply_of_kubectl_takes_over_from_client_side_apply() {
    let last = "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"a\"},\"data\":{\"k\":\"1\",\"l\":\"1\"}}";
    let mut live = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "annotations": {LAST_APPLIED: last}}, "data": {"k": "1", "l": "1"}});
    track_update(
        CONFIG_MAP,
        None,
        &mut live,
        "kubectl-client-side-apply",
        "",
        "2024-01-01T00:00:00Z",
    );
    assert!(
        apply(
            CONFIG_MAP,
            Some(&live),
            "other",
            false,
            json!({"data": {"k": "2"}})
        )
        .is_err()
    );
    let taken = apply(
        CONFIG_MAP,
        Some(&live),
        "kubectl",
        false,
        json!({"data": {"k": "2"}}),
    )
    .unwrap();
    assert_eq!(taken["data"]["k"], "2");
}

#[test]
fn sets_survive_their_json_form() {
    let object = spec(
        json!([{"name": "c", "ports": [{"containerPort": 1, "protocol": "UDP"}], "args": ["x"]}]),
    );
    let set = typed::fields(shape_of(DEPLOYMENT), &object);
    assert_eq!(Set::from_json(&set.to_json()), set);
    for foreign in [
        json!(1),
        json!({"x": {}}),
        json!({"k:{": {}}),
        json!({"f:a": 3}),
    ] {
        let _ = Set::from_json(&foreign);
    }
}

proptest::proptest! {
    /// Whoever applies alone gets exactly what they apply, whatever they applied before.
    #[test]
    fn a_single_manager_gets_what_it_applies(
        first in proptest::collection::btree_map("[a-c]", "[0-2]", 0..4),
        second in proptest::collection::btree_map("[a-c]", "[0-2]", 0..4),
    ) {
        let config = |data: &std::collections::BTreeMap<String, String>| {
            if data.is_empty() { json!({}) } else { json!({"data": data}) }
        };
        let one = apply(CONFIG_MAP, None, "m", false, config(&first)).unwrap();
        let two = apply(CONFIG_MAP, Some(&one), "m", false, config(&second)).unwrap();
        let fresh = apply(CONFIG_MAP, None, "m", false, config(&second)).unwrap();
        proptest::prop_assert_eq!(two.get("data"), fresh.get("data"));
        proptest::prop_assert_eq!(owner(&two, "m"), owner(&fresh, "m"));
    }

    /// Every field of an object has an owner after a write, and only fields that exist have one.
    #[test]
    fn tracked_fields_are_the_fields_there_are(
        before in proptest::collection::btree_map("[a-d]", "[0-1]", 1..4),
        after in proptest::collection::btree_map("[a-d]", "[0-1]", 1..4),
    ) {
        let object = |data: &std::collections::BTreeMap<String, String>| json!({"metadata": {"name": "a"}, "data": data});
        let old = written(None, "one", object(&before), "2024-01-01T00:00:00Z");
        let mut new = object(&after);
        new["metadata"]["managedFields"] = old["metadata"]["managedFields"].clone();
        let new = written(Some(&old), "two", new, "2024-01-02T00:00:00Z");
        let mut all: Vec<String> = Managers::of(&new).union().paths();
        all.retain(|p| p != ".data");
        let expected: Vec<String> = after.keys().map(|k| format!(".data.{k}")).collect();
        proptest::prop_assert_eq!(all, expected);
    }
}
