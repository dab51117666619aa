from json import loads, JSONDecodeErr
