//! Runs on a server of MLflow, here one that takes down what it is asked and answers as the test says.

use super::alone;
use sconce_core::trackers::{MlflowServer, Tracker, Trackers};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// What a server was asked: the path behind `/api/2.0/mlflow/`, the token, and the body.
#[derive(Debug)]
struct Request {
    path: String,
    authorization: String,
    body: Value,
}

/// Starts a server on this machine; `answer` gives status and body. It ends with the test.
fn server(answer: impl Fn(&Request) -> (u16, Value) + Send + Sync + 'static) -> (String, Receiver<Request>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (told, requests) = mpsc::channel();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let connection = connection.unwrap();
            let Some(request) = read(&connection) else { continue };
            let (status, body) = answer(&request);
            let body = body.to_string();
            let length = body.len();
            let text = format!("HTTP/1.1 {status} x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            // Told first: a test looks once it has the answer. Whoever gave up is gone.
            let _ = told.send(request);
            let _ = (&connection).write_all(text.as_bytes());
        }
    });
    (address, requests)
}

fn read(connection: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(connection);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.strip_prefix("/api/2.0/mlflow/")?.to_owned();
    let (mut length, mut authorization) = (0, String::new());
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else {
            break;
        };
        match name.to_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "authorization" => authorization = value.into(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request {
        path,
        authorization,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}

/// Answers as MLflow does where the experiment is new and all is well.
fn well(request: &Request) -> (u16, Value) {
    match request.path.as_str() {
        path if path.starts_with("experiments/get-by-name") => {
            (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}))
        }
        "experiments/create" => (200, json!({"experiment_id": "7"})),
        "runs/create" => (200, json!({"run": {"info": {"run_id": "abc"}}})),
        _ => (200, json!({})),
    }
}

fn boxed(server: MlflowServer) -> Vec<Box<dyn Tracker>> {
    vec![Box::new(server)]
}

#[test]
fn a_server_gets_experiment_run_parameters_metrics_and_the_end() {
    let (address, requests) = server(well);
    let acc = alone();
    let tracker = MlflowServer::new(address + "/").token("secret");
    let config = json!({"lr": 0.5, "model": {"layers": 2, "name": "a: b"}, "long": "x".repeat(6001)});
    acc.init_trackers("my demo", &config, Trackers::new(boxed(tracker)).strict(true))
        .unwrap();
    for step in 0..2500_u32 {
        acc.log(&[("loss", f64::from(step)), ("train,lr", f64::NAN)], step.into())
            .unwrap();
    }
    acc.end_training().unwrap();

    let requests = Vec::from_iter(requests.try_iter());
    assert!(requests.iter().all(|request| request.authorization == "Bearer secret"));
    let paths = Vec::from_iter(requests.iter().map(|request| request.path.as_str()));
    let start = [
        "experiments/get-by-name?experiment_name=my%20demo",
        "experiments/create",
        "runs/create",
    ];
    assert_eq!(paths[..3], start);
    assert_eq!(requests[1].body, json!({"name": "my demo"}));
    assert_eq!(requests[2].body["experiment_id"], "7");
    assert!(requests[2].body["start_time"].as_u64().unwrap() > 1_600_000_000_000);
    let parameters = json!([
        {"key": "lr", "value": "0.5"}, {"key": "model/layers", "value": "2"}, {"key": "model/name", "value": "a: b"},
    ]);
    assert_eq!(requests[3].body, json!({"run_id": "abc", "params": parameters}));

    let (end, batches) = requests[4..].split_last().unwrap();
    assert_eq!(end.path, "runs/update");
    assert_eq!(
        (&end.body["run_id"], &end.body["status"]),
        (&json!("abc"), &json!("FINISHED"))
    );
    assert!(end.body["end_time"].as_u64() >= requests[2].body["start_time"].as_u64());
    let mut metrics = Vec::new();
    for batch in batches {
        assert_eq!(
            (batch.path.as_str(), &batch.body["run_id"]),
            ("runs/log-batch", &json!("abc"))
        );
        let batch = batch.body["metrics"].as_array().unwrap();
        assert!(batch.len() <= 1000);
        metrics.extend(batch.clone());
    }
    // In order, none lost, and none twice.
    assert_eq!(metrics.len(), 5000);
    for (number, metric) in metrics.iter().enumerate() {
        assert_eq!(metric["step"], number / 2);
        assert!(metric["timestamp"].as_u64().unwrap() > 1_600_000_000_000);
        if number % 2 == 0 {
            assert_eq!(
                (&metric["key"], &metric["value"]),
                (&json!("loss"), &json!((number / 2) as f64))
            );
        } else {
            assert_eq!((&metric["key"], &metric["value"]), (&json!("train_lr"), &json!("NaN")));
        }
    }
}

#[test]
fn a_server_that_is_away_for_a_moment_misses_nothing() {
    let failures = std::sync::atomic::AtomicU32::new(0);
    let (address, requests) = server(move |request| {
        let first =
            request.path == "runs/log-batch" && failures.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        if first { (503, json!({})) } else { well(request) }
    });
    let acc = alone();
    acc.init_trackers(
        "demo",
        &(),
        Trackers::new(boxed(MlflowServer::new(address))).strict(true),
    )
    .unwrap();
    acc.log(&[("loss", 0.5)], 3).unwrap();
    acc.end_training().unwrap();
    let batches = Vec::from_iter(requests.try_iter().filter(|request| request.path == "runs/log-batch"));
    assert_eq!(batches.len(), 2);
    assert_eq!(batches[0].body, batches[1].body);
}

#[test]
fn a_server_that_refuses_is_left_out_with_one_warning_that_has_its_words() {
    let (address, _requests) = server(|request| match request.path.as_str() {
        "runs/log-batch" => (
            400,
            json!({"error_code": "INVALID_PARAMETER_VALUE", "message": "no such run"}),
        ),
        _ => well(request),
    });
    let acc = alone();
    acc.init_trackers("demo", &(), boxed(MlflowServer::new(address.clone())))
        .unwrap();
    for step in 0..3 {
        acc.log(&[("loss", 0.5)], step).unwrap();
    }
    acc.end_training().unwrap();
    let warnings = acc.tracker_warnings();
    let expected = format!("tracker mlflow: {address}: 400 ");
    assert!(
        warnings.len() == 1
            && warnings[0].starts_with(&expected)
            && warnings[0].contains("INVALID_PARAMETER_VALUE: no such run"),
        "{warnings:?}"
    );
}

/// Starts a server that answers nothing behind the start of a run until what is returned with its address is dropped.
fn silent_server() -> (String, mpsc::Sender<()>) {
    let (release, held) = mpsc::channel();
    let held = std::sync::Mutex::new(held);
    let (address, _) = server(move |request| {
        if request.path == "runs/log-batch" {
            let _ = held.lock().unwrap().recv();
        }
        well(request)
    });
    (address, release)
}

#[test]
fn a_server_that_does_not_answer_stops_neither_training_nor_its_end() {
    let acc = alone();
    let (address, _release) = silent_server();
    let tracker = MlflowServer::new(address).deadline(Duration::from_millis(50));
    acc.init_trackers("demo", &(), boxed(tracker)).unwrap();
    acc.log(&[("loss", 0.5)], 0).unwrap();
    acc.end_training().unwrap();
    let warnings = acc.tracker_warnings();
    let expected = "has not taken the run's last values within 0.05 s";
    assert!(warnings.len() == 1 && warnings[0].contains(expected), "{warnings:?}");

    let (address, _release) = silent_server();
    acc.init_trackers("demo", &(), boxed(MlflowServer::new(address)))
        .unwrap();
    for step in 0..10_000 {
        acc.log(&[("loss", 0.5)], step).unwrap();
    }
    let warnings = acc.tracker_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("4096 calls of `log` behind"),
        "{warnings:?}"
    );
}

#[test]
fn a_server_that_is_not_there_is_named_without_its_password() {
    // A port that nobody listens at any more.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let acc = alone();
    let tracker = MlflowServer::new(format!("http://me:password@127.0.0.1:{port}"));
    assert!(!format!("{tracker:?}").contains("password"));
    acc.init_trackers("demo", &(), boxed(tracker)).unwrap();
    acc.log(&[("loss", 0.5)], 0).unwrap();
    let warnings = acc.tracker_warnings();
    assert!(
        warnings.len() == 1
            && warnings[0].contains(&format!("http://127.0.0.1:{port}: "))
            && !warnings[0].contains("password"),
        "{warnings:?}"
    );
}
