//! The round trip with the Rust client of openapi-generator.
use openapi::apis::configuration::{ApiKey, Configuration};
use openapi::apis::{overview_api, platform_api as platform, timers_api as timers, Error};
use openapi::models::{http_callback, CreatePlatformTimer, CreatePlatformTimerCallback, HttpCallback};
use openapi::models::{BatchIn, Changes, CreateTimer, RetryPolicy, Status};
use serde_json::json;
use std::collections::HashMap;
use std::env::var;

fn timer(id: &str) -> CreateTimer {
    CreateTimer {
        id: Some(id.into()),
        delay: Some("1h".into()),
        callback_url: Some("http://127.0.0.1:9/hook".into()),
        ..CreateTimer::new()
    }
}

#[tokio::main]
async fn main() {
    let later = chrono::DateTime::parse_from_rfc3339("2099-01-31T09:00:00Z").unwrap();
    let mut to = Configuration::new();
    to.base_path = var("DUETIME_URL").unwrap();
    to.api_key = Some(ApiKey { prefix: None, key: var("API_KEY").unwrap() });

    let asked = CreateTimer {
        callback_headers: Some(HashMap::from([("X-Tenant".into(), "acme".into())])),
        payload: Some(Some(json!({"invoice": 42}))),
        correlation_id: Some("trip".into()),
        retry_policy: Some(Box::new(RetryPolicy {
            max_retries: Some(5),
            initial_interval: Some("10s".into()),
            ..RetryPolicy::new()
        })),
        ..timer("trip-1")
    };
    let created = timers::create(&to, asked).await.unwrap();
    assert_eq!((created.status, created.callback_subject.clone()), (Status::Pending, None));
    assert_eq!(created.payload, Some(json!({"invoice": 42})));
    assert_eq!(created.callback_headers["X-Tenant"], "acme");
    assert_eq!((created.retry_policy.max_retries, created.retry_policy.give_up_on.len()), (5, 0));

    assert_eq!(timers::get(&to, "default", "trip-1").await.unwrap(), created);

    let page = timers::list(&to, None, None, Some(Status::Pending), Some("trip"), None, None, None, None).await.unwrap();
    assert_eq!((page.timers, page.next_cursor), (vec![created.clone()], None));

    let changes = Changes { execute_at: Some(later), ..Changes::new() };
    let updated = timers::update(&to, "default", "trip-1", changes).await.unwrap();
    assert_eq!((updated.execute_at, updated.payload), (later, created.payload));
    assert_eq!((updated.callback_headers, updated.retry_policy), (created.callback_headers, created.retry_policy));

    let canceled = timers::cancel(&to, "default", "trip-1").await.unwrap();
    assert_eq!((canceled.status, canceled.executed_at), (Status::Canceled, None));

    let bad = CreateTimer { execute_at: Some(later), ..timer("trip-3") };
    let results = timers::batch(&to, BatchIn::new(vec![timer("trip-2"), bad]), None).await.unwrap().results;
    let (made, refused) = (&results[0], &results[1]);
    assert_eq!((made.status, made.timer.as_ref().unwrap().id.as_str()), (200, "trip-2"));
    assert!(made.error.is_none());
    assert_eq!((refused.status, &refused.error.as_ref().unwrap().details["field"]), (400, &json!("delay")));

    let mut callback = HttpCallback::new(http_callback::Type::Http);
    callback.url = Some("http://127.0.0.1:9/platform".into());
    callback.payload = Some(Some(json!([1])));
    let callback = CreatePlatformTimerCallback::HttpCallback(Box::new(callback));
    let asked = CreatePlatformTimer { callback: Some(Box::new(callback)), ..CreatePlatformTimer::new(later) };
    let summary = platform::platform_create(&to, asked).await.unwrap().data;
    let shown = platform::platform_get(&to, &summary.id).await.unwrap().data;
    assert_eq!((shown.execute_at, shown.callback_url.as_deref()), (later, Some("http://127.0.0.1:9/platform")));
    assert_eq!((shown.callback_payload, shown.last_error), (Some(json!([1])), None));

    let overview = overview_api::overview(&to).await.unwrap();
    assert_eq!(overview.statuses["pending"], 2);

    let nobody = platform::platform_get(&to, "00000000-0000-4000-8000-000000000000").await;
    let Err(Error::ResponseError(answer)) = nobody else { panic!() };
    assert_eq!(answer.status, 404);
    let Some(platform::PlatformGetError::Status400(failure)) = answer.entity else { panic!("{}", answer.content) };
    assert_eq!((failure.code as i32, failure.data), (3, None));

    let Err(Error::ResponseError(answer)) = timers::get(&to, "default", "missing").await else { panic!() };
    assert_eq!(answer.status, 404);
    // The variants of an error have the same fields: the first one always fits.
    let Some(timers::GetError::Status400(failure)) = answer.entity else { panic!("{}", answer.content) };
    assert_eq!(failure.error, "TIMER_NOT_FOUND");
}
